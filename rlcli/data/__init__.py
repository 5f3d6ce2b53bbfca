"""Data passed between controller and workers: columns of samples, messages, and the packer."""
