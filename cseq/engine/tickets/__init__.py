"""The requests of a pool: batches of an order, or items of streams."""
