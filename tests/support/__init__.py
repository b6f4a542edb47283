"""Helpers of the tests; no tests."""
