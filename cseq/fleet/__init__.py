"""Batches from other machines, made by Ray actors that a crew's threads call.

``ray``   the public fleet class, its actors, and the threads that call them
``wire``  the connection between a thread and an actor
"""
