//! A layer around a reqwest client.

use http::{Request, Response};
use tower::{Service, ServiceBuilder};
use tower_semaphore::ConcurrencyLimitLayer;
use tower_semaphore::limit::{BoxError, ResponseBody};

/// Wraps `inner`, a `reqwest::Client` or any service of its types, such as one that retries. The outer adapters convert
/// to the types of `http` for the layer, the inner ones back.
pub(crate) fn limited<S>(
    inner: S,
    limit: ConcurrencyLimitLayer,
) -> impl Service<reqwest::Request, Response = reqwest::Response, Error = BoxError, Future: Send>
+ Clone
+ Send
where
    S: Service<reqwest::Request, Response = reqwest::Response, Error: Into<BoxError>, Future: Send>,
    S: Clone + Send,
{
    ServiceBuilder::new()
        .filter(|request: reqwest::Request| Request::<reqwest::Body>::try_from(request))
        .map_response(|response: Response<ResponseBody<reqwest::Body>>| {
            reqwest::Response::from(response.map(reqwest::Body::wrap))
        })
        .layer(limit.into_error())
        .filter(|request: Request<reqwest::Body>| reqwest::Request::try_from(request))
        .map_response(Response::<reqwest::Body>::from)
        .service(inner)
}
