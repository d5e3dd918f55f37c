"""The roofline harness: the grid of cases, their measurement on a device, rows, tables and plots."""
