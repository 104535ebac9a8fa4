"""Decide which rank computes which part of attention (plans, no torch), and run it (executors, torch)."""
