"""Batches from other machines.

``ledger``    which tickets are in which parcel, at which agent
``agent``     what a fleet and its agents are to the trainer
``server``    worker processes that make the batches of parcels: an agent's end
``dispatch``  the trainer's thread that sends tickets to agents, and publishes answers
``pool``      the loop's end of a fleet
``keys``      keys of a loader's batches in tickets
``ray``       fleets of Ray actors, as their users and a trainer see them
``actors``    what runs on the nodes of a Ray cluster; only these two modules import ray
"""
