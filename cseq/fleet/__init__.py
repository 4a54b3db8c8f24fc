"""Batches from other machines: threads that each ask a Ray actor for one.

``ray``   a fleet, as its users see it; its actors; the threads that ask them
``wire``  the connection between a thread and an actor
"""
