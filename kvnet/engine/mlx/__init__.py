"""The only importer of mlx and mlx_lm."""
