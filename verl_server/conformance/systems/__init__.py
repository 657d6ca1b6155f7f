"""The systems that the conformance suite can test. Each file has one system; `base.py` says what a system offers."""
