"""The published algorithms as small pure functions over per-token columns, one concept a file.

A column has one entry for each of the K response tokens of a micro-batch, sequence after sequence; `Spans` says
where each sequence lies. Columns that come from the policy under training carry gradients, all others do not.
"""
