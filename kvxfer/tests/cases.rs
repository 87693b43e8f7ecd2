//! What endpoints promise, over TCP.
#![allow(missing_docs)]

mod handover {
    kvxfer_cases::handover!(kvxfer_cases::TCP);
}
mod grants {
    kvxfer_cases::grants!(kvxfer_cases::TCP);
}
mod faults {
    kvxfer_cases::faults!(kvxfer_cases::TCP);
}
