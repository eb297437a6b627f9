"""Benchmarks of fastreduce through its public API, each figure beside a peer and a bound."""
