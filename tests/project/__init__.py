"""Tests of the project as a whole: rules, interface, documents and job files."""
