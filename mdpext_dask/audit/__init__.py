"""Auditors: whether what a store holds is as private as it says."""
