"""The conformance suite: cases that every system for weight updates and generation should pass.

`cases/` has the cases, each with a claim and the public issues in which a system did not do what the claim says.
`systems/` has the systems: `VerlEngine` with an SGLang or a vLLM server, SGLang's own adapter, and vLLM's own reload.
`suite.py` runs the cases in processes of their own, so that a case that hangs is reported and the next case runs.
`verl-server conformance` is the command.
"""
