"""How fast leasetask is, beside the server's own limit and beside other engines."""
