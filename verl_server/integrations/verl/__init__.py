"""The plugin for verl: `actor_rollout_ref.rollout.name=verl_server` chooses the servers of this library.

plugin.py             entry point `verl.plugins`: registers everything with verl, in each process that imports verl
versions.py           versions of verl that this plugin supports
cpu_platform.py       verl's platform for machines without an accelerator
fleet_spec.py         settings of one fleet, made from verl's configuration
own_settings.py       settings of this plugin in verl's configuration
replica.py            verl's replica: asks the fleet for one more server, at the place of its workers
watch.py              ends verl's task runner when all servers are lost for ever
actor/                the Ray actor that owns the servers of a fleet
ray_fleet.py          the fleet of the actor as the backend of a `VerlEngine` in the trainer
ray_target.py         calls of trainer rank 0 to servers of the actor
trainer_engine.py     the `VerlEngine` of the trainer ranks for one fleet, and the steps of its weight versions
adapter.py            verl's rollout on each trainer rank: resume, update of the weights
checkpoint_engine.py  verl's checkpoint engine `verl_server`, for rollouts with devices of their own
shards.py             weights as shards instead of verl's gathered tensors

This module imports nothing, so that the actor need not import verl.
"""
