"""Batches from other machines: each thread of a crew asks a Ray actor for one.

``ray``   a fleet, as its users see it; its actors; the threads that ask them
``wire``  the connection between a thread and an actor
"""
