"""The demo: real events of three datacenters, mirrored into one aggregate and proven record by record."""
