"""Names and colours of methods, formats of numbers, and pictures of matrices and partitions."""
