"""The systems that the conformance suite can test. Each file has one system; `conformance/system.py` says what a system offers."""
