"""Recorded traffic: a loader for each public trace form, all read as streams, and the writer of the native form.

A loader only says what a row means; `build` makes sessions of rows, `index` finds the rows of a session in a file
without holding them, and `workload` is the kind `trace` of a `[workload]` table.
"""
