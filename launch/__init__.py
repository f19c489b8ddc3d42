"""Command line programs; each teaches itself with --help."""
