"""The Ray actor that owns the servers of a fleet. It imports no verl.

fleet_actor.py   the actor: replicas, requests, sleep and wake, calls of the trainer
replicas.py      start of the manager of the fleet and of its replicas
generation.py    verl's requests and replies; requests that are aborted for an update return what they have
token_output.py  verl's reply, without an import of verl in the actor
replay_jobs.py   what the actor asks the trainer for: the published weights for a server that was started again
"""
