"""Convolutions over channels-last images."""
