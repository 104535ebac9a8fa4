"""Block kernels behind one contract (`contract.py`), loaded when first used."""
