"""The systems that the conformance suite can test. `conformance/system.py` says what a system offers."""
