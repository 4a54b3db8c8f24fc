"""Batches from other machines, made by Ray actors.

``ray``   the public fleet class, the actors, and the threads that call them
``wire``  the connection between a thread and an actor
"""
