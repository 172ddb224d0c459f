"""A package, because libraries install packages of this name, which would be imported by Ray's processes instead."""
