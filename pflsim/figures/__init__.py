"""Draws curves, bars, and heat maps as matplotlib figures, and converts figures to SVG and PNG."""
