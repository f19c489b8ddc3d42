"""Reference numbers made by other software, run through this library; `python -m tests.oracle DIR`."""
