"""Side-by-side benchmarks: each runs what it is compared with in the same minute and prints both, and the ratio."""
