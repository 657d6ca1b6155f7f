"""The plugin for verl: `actor_rollout_ref.rollout.name=verl_server` chooses the servers of this library.

plugin.py        entry point `verl.plugins`: registers everything with verl, in each process that imports verl
settings.py      settings of one fleet, made from verl's configuration, and supported versions of verl
fleet_actor.py   the Ray actor that owns the servers of the policy. It imports no verl
generation.py    verl's requests and replies, in the actor
ray_fleet.py     the trainer ranks: the fleet of the actor, and the `VerlEngine` that uses it. It imports no verl
verl_classes.py  the classes that verl makes: replicas, rollout, checkpoint engine; and weights as shards

This module imports nothing, so that the actor need not import verl.
"""
