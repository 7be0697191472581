#![no_main]

kiln_fuzz::program!(arguments);
