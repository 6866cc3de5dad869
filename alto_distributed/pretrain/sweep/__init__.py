"""``sweep``: the best rate of each optimizer by successive halving, then several seeds at these rates."""
