"""The harness: the one room that sees all others, and runs them as a user asks.

Importing it opens nothing. Its commands are in `harness.cli`; a user's own locustfile imports
`harness.users`, which needs Locust and therefore is never imported from here.
"""
