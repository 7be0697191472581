#![no_main]

kiln_fuzz::program!(jpeg);
