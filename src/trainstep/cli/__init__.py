"""The command line: one file for each verb, which parses, calls one function and prints. Heavy imports happen inside the verbs."""
