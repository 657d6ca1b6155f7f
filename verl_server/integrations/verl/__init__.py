"""The plugin for verl: `actor_rollout_ref.rollout.name=verl_server` chooses the servers of this library.

plugin.py        entry point `verl.plugins`: registers everything with verl, in each process that imports verl
cpu_platform.py  verl's platform for machines without an accelerator
settings.py      settings of one fleet, made from verl's configuration, and supported versions of verl
replica.py       verl's replica: asks the fleet for one more server, at the place of its workers
fleet_actor.py   the Ray actor that owns the servers of the policy. It imports no verl
generation.py    verl's requests and replies, in the actor
ray_fleet.py     the fleet of the actor as the backend of a `VerlEngine` in the trainer, and calls to its servers
trainer_engine.py  the `VerlEngine` of the trainer ranks. It imports no verl
trainer.py       the trainer ranks: rollout, checkpoint engine, weights as shards

This module imports nothing, so that the actor need not import verl.
"""
