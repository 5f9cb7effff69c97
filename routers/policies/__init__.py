"""Policies, one family a file. A policy only decides: nothing in this folder imports a socket or a clock."""
