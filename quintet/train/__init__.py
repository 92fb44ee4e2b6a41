"""The outer loops."""
