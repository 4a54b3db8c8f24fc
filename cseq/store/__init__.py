"""What was read and decoded once, for all workers and ranks of a machine.

``cache``       `cached`: a data set whose samples are kept
``entries``     the folder that they are kept in: claims, room, entries that are whole or absent
"""
