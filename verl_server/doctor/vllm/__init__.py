"""Checks of environments and models for vLLM servers.

environment.py  versions, missing modules, the platform that vLLM selects, and its console script
variables.py    environment variables of vLLM that disturb a server
model.py        whether vLLM can serve a model: architecture, and sizes of heads on a CPU
"""
