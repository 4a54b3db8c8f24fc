"""What a pool asks for: batches of an order, or items of streams."""
