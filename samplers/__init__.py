"""Decide which ranks run which pack, in which slot; simulate it. Integers only: no torch."""
