"""Plugins into other trainers, one folder each."""
