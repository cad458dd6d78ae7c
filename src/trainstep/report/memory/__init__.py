"""Memory in a report: tables, page, answer, and the tables of an allocator's snapshot."""
