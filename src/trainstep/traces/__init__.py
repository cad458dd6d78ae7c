"""Reading what profilers wrote: events, whose they are, their classes, and what the host was doing meanwhile. No torch."""
