"""Decide which documents share a micro-batch, and which tokens of it each rank holds. Integers only: no torch."""
