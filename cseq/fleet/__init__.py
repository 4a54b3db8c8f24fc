"""Batches from other machines: parcels of tickets, and who makes them."""
