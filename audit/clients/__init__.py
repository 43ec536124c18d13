"""What runs beside an application's producers and consumers: counts, journal, reports."""
