"""Tests, mirroring the packages they test; `tests.oracle` runs reference numbers."""
