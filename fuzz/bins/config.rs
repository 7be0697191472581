#![no_main]

kiln_fuzz::program!(config);
