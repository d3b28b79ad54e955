"""Modules, layers, initialisation and flat parameter storage."""
