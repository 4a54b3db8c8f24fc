"""Batches from other machines: each thread of a crew calls a Ray actor.

``ray``   the public fleet class, its actors, and the threads that call them
``wire``  the connection between a thread and an actor
"""
